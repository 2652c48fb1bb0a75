// A host in Rust with handlers of its own: they are the same after a world of two processes, and still called.
use std::sync::atomic::{AtomicUsize, Ordering};

extern "C" {
    fn signal(number: i32, handler: extern "C" fn(i32)) -> usize;
    fn raise(number: i32) -> i32;
    fn remember_handlers();
    fn train() -> i32;
}

static CALLS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: i32) {
    CALLS.fetch_add(1, Ordering::SeqCst);
}

fn main() {
    // Of Linux: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGHUP, SIGTERM, SIGINT.
    let numbers = [11, 7, 8, 4, 6, 1, 15, 2];
    unsafe {
        for number in numbers {
            signal(number, count);
        }
        remember_handlers();
        if train() != 0 {
            std::process::exit(1);
        }
        for number in numbers {
            raise(number);
        }
    }
    assert_eq!(CALLS.load(Ordering::SeqCst), numbers.len());
    println!("all handlers are the host's own");
}
