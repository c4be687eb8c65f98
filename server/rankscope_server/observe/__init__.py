"""What detectors look at: tables of one attempt, in bounded memory."""
