"""One file a library. Vendor libraries are imported inside the functions that need them."""
