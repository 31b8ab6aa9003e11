"""What ops and everything beside them take: seconds, workspaces, optimizer state, static memory."""
