"""From a checked request to a plan: the stages in their order, and what a solution says in the user's words."""
