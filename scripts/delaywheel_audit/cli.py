"""`delaywheel reconcile`: joins the command line tool by its entry point."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup


class _AsGiven(TyperGroup):
    """Passes every argument on: the job reads them itself, as it does under spark-submit."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["delaywheel.reconcile"] = list(args)
        return super().parse_args(ctx, [])


app = typer.Typer(
    cls=_AsGiven, rich_markup_mode=None, invoke_without_command=True, no_args_is_help=False
)


@app.callback()
def reconcile(context: typer.Context) -> None:
    """Prove from ledger and Kafka that every message was forwarded once, on time."""
    try:
        # Only here: Spark is heavy, and every command of the tool loads this module.
        from delaywheel_audit.job import main  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j"):
            raise
        print("error: SPARK_MISSING: pip install 'delaywheel[audit]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(context.meta["delaywheel.reconcile"]))
