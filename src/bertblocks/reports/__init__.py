"""HTML reports and charts of runs, from plain data."""
