"""Plans in other libraries' training loops; each module needs its library only when it is used."""
