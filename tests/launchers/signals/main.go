// A host in Go, whose runtime has handlers for all signals: they are the same after a world of two processes, and still work.
package main

/*
void remember_handlers(void);
int train(void);
*/
import "C"

import (
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"
)

func recovers() (caught bool) {
	defer func() { caught = recover() != nil }()
	var nothing *int
	*nothing = 1 // SIGSEGV
	return false
}

func main() {
	debug.SetPanicOnFault(true)
	heard := make(chan os.Signal, 8)
	signal.Notify(heard, syscall.SIGHUP, syscall.SIGTERM, syscall.SIGINT)
	C.remember_handlers()
	if C.train() != 0 {
		os.Exit(1)
	}
	if !recovers() {
		fmt.Println("a nil pointer is no panic any more")
		os.Exit(1)
	}
	for _, each := range []syscall.Signal{syscall.SIGHUP, syscall.SIGTERM, syscall.SIGINT} {
		syscall.Kill(os.Getpid(), each)
		select {
		case got := <-heard:
			if got != each {
				fmt.Println(each, "came as", got)
				os.Exit(1)
			}
		case <-time.After(10 * time.Second):
			fmt.Println(each, "is not heard any more")
			os.Exit(1)
		}
	}
	fmt.Println("all handlers are the host's own")
}
