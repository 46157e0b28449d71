"""[3] Python handles of the ops on parameter server tasks."""
