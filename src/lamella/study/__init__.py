"""What runs show: analysed, compared, recommended and reported from their folders."""
