"""Pages and charts that show what a run did."""
