"""Tools that look at a program or a machine. Training never imports them."""
