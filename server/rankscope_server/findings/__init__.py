"""What a finding is, and what all detectors share: thresholds, statistics, wording."""
