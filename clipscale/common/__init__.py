"""Parts that every package uses: errors, units, files, hardware, random states."""
