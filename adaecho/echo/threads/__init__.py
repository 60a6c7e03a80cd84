"""Worker threads that read ahead, and the timers that see who waits for whom."""
