"""What a process knows of itself: its launcher, its environment, the code that it runs."""
