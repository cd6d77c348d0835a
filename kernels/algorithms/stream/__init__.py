"""Stream: rows move by bulk copies, on few SMs."""
