"""Every private part of torch that the planner needs, and nothing else; each with a test."""
