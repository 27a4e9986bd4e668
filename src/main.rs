//! Arguments, the allocator, exit codes. Everything else is in the library.

use std::process::ExitCode;

/// librdkafka allocates on one thread and frees on another, which the C library's allocator handles badly: with this
/// one, for C too, a Kafka send costs half.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    lanebridge::cli::main()
}
