"""Models over files of any size: shards that survive kills, on one machine, several, Ray or Spark."""
