"""Statistics of studies: differences with their uncertainty, verdicts, power, futility, and fits."""
