"""Process groups as ranks reported them, and the mesh that they span."""
