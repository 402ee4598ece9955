"""How a run starts: settle (which settings, which checkpoint), build (all parts), announce (log and notices)."""
