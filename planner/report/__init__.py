"""Plans for people: text, HTML, drawings, explanations, comparisons. Nothing here solves or runs."""
