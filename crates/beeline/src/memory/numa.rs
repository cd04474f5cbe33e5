//! Which CPUs are near a device.

use beeline_sys::thread;

/// Confines the calling thread to the CPUs of `node` that it may use. Leaves it as it was where there
/// are none, where that would change nothing, or where the system does not tell.
pub(crate) fn stay_near(node: u32) {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let Ok(list) = std::fs::read_to_string(path) else { return };
    let Ok(allowed) = thread::allowed_cpus() else { return };
    let near = parse_list(&list);
    let both: Vec<usize> = allowed.iter().copied().filter(|cpu| near.contains(cpu)).collect();
    if !both.is_empty() && both.len() < allowed.len() {
        // Only a matter of speed: a refusal leaves the thread where it was.
        let _ = thread::pin_to(&both);
    }
}

/// The numbers of a kernel list (`0-3,8,10-11`); what does not read as one is left out.
fn parse_list(text: &str) -> Vec<usize> {
    const CPUS_MAX: usize = 1 << 16;
    let mut out = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>())
            && last < CPUS_MAX
        {
            out.extend(first..=last);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::parse_list;

    #[test]
    fn kernel_lists_are_ranges_and_numbers() {
        let cases = [
            ("0-3,8,10-11\n", vec![0, 1, 2, 3, 8, 10, 11]),
            ("", vec![]),
            ("5", vec![5]),
            ("3-1", vec![]),
            ("0-99999999", vec![]),
            ("x,2", vec![2]),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_list(text), expected, "{text:?}");
        }
    }
}
