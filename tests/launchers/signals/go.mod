module signals

go 1.19
