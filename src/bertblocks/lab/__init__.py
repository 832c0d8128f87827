"""Architecture studies: variants at equal budgets, paired seeds, measures, and a verdict with its uncertainty."""
