"""One rank's end of a group: argument checks, the queue of operations, and the engine that runs them."""
