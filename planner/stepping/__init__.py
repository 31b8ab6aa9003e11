"""The optimizer inside the backward pass: each parameter is stepped once its gradient is whole."""
