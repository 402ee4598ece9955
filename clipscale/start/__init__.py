"""How a run starts: resolve (which settings), build (all parts), announce (notices). `folder.py` has what it writes."""
