"""What detectors of several topics need."""
