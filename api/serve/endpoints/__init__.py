"""What the server answers, a file for each kind of request: `add(app, serving)`."""
