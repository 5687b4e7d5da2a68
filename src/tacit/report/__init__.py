"""What was measured, for people: tables and pictures."""
