"""Matrix products of our own, and those that leave SMs to what runs beside them."""
