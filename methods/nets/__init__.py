"""Network pieces that several systems stand on."""
