"""Pages: each is a list of sections, which ask one question and write its answer as HTML."""

from trakdask.explorer.pages.section import Section, sections

__all__ = ["Section", "sections"]
