"""What the front end costs: the real server before an engine that computes nothing."""
