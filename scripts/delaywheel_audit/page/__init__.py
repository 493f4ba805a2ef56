"""The reconciliation as one HTML page that needs nothing beside it: no scripts, no fonts."""

from delaywheel_audit.page.document import write_page

__all__ = ["write_page"]
