"""See it think: a page with a network in it, to draw on and to watch it settle."""

from pcdeq.play.page import SHIPPED, write_page

__all__ = ["SHIPPED", "write_page"]
