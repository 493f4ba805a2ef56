"""The reconciliation as one self-contained HTML page, without scripts or fonts."""

from delaywheel_audit.page.document import write_page

__all__ = ["write_page"]
