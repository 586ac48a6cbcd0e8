"""How long steps take, by layout and mode: a roofline that measured steps correct."""
