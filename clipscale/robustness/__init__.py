"""What a run does about its own machine: full disks, closed outputs, limits on memory, and damaged records."""
