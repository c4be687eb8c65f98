"""What is stored of a run, page by page, for programs that compute with it."""
