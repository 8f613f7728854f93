"""The explorer: pages in a browser that answer questions to lazy attributions.

``questions`` computes small tables and knows nothing of pages; ``pages`` write them as HTML by
templates; ``app`` shows them in a browser with Panel, which is imported when an app is made.
"""

from trakdask.explorer.explorer import Explorer, explore
from trakdask.explorer.marks import Marks

__all__ = ["Explorer", "Marks", "explore"]
