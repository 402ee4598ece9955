"""How a run starts: resolve (which settings), build (all parts), announce (notices), and what it writes."""
