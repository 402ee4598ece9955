"""How a run starts: settle (which settings), build (all parts), announce (notices). `folder.py` has what it writes."""
