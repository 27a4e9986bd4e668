//! CPU of processes, from /proc.

/// Ticks of /proc a second: USER_HZ, which is 100 on every architecture we build for, whatever the kernel's own HZ.
const TICKS: f64 = 100.0;

/// What /proc/PID/stat says, in seconds of user and system time.
struct Stat {
    parent: u32,
    own: f64,
    /// Of children that ended and were waited for.
    reaped: f64,
}

/// None when the process is gone.
fn stat(pid: &str) -> Option<Stat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in parentheses that may hold anything; what follows begins with the third.
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    let ticks = |field: usize| fields[field - 3].parse::<f64>().unwrap();
    Some(Stat {
        parent: fields[4 - 3].parse().unwrap(),
        own: (ticks(14) + ticks(15)) / TICKS,
        reaped: (ticks(16) + ticks(17)) / TICKS,
    })
}

/// Seconds that all threads of a process took.
pub fn of_process(pid: u32) -> f64 {
    stat(&pid.to_string()).unwrap_or_else(|| panic!("process {pid} is gone")).own
}

/// Seconds that a process and all its children took: those that run, and those that ended, which the kernel adds to
/// their parent when it waits for them. So a backend that ends during the run is not lost.
pub fn of_family(parent: u32) -> f64 {
    let own = stat(&parent.to_string()).unwrap_or_else(|| panic!("process {parent} is gone"));
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let children = processes.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter_map(|pid| stat(&pid));
    own.own + own.reaped + children.filter(|child| child.parent == parent).map(|child| child.own).sum::<f64>()
}
