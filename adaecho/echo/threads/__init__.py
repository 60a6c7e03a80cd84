"""Worker threads that read ahead, processes that they ask, and the timers that see who waits for whom."""
