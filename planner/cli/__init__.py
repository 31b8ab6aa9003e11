"""The command line, in parts: `arguments` reads it, `target` loads what it names, `commands` do it."""
