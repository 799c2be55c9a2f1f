"""Values of codes: classes and scales of crosswalks, groups, and their expected values."""
