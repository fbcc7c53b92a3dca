"""Tasks, threads, the event loop of synchronous hosts, and termination signals."""
