"""The formats that tables come from and go to, one module each."""
