//! Registration: the proof that memory is pinned and mapped for one NIC.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use beeline_core::addr::ByteRange;

use super::peer::{Address, CLIENTS, Claim, DmaMap, Invalidate, PageTable, PeerClient, Subject};
use crate::error::{Error, Result};
use crate::verbs::Memory;

/// Memory that is pinned and mapped. Dropping it undoes both, in reverse order.
///
/// Printed with `{}` it shows the whole chain, from the address a program uses to the one a NIC names.
#[derive(Debug)]
pub struct Registration {
    client: &'static dyn PeerClient,
    holder: String,
    claim: Option<Claim>,
    pages: Option<PageTable>,
    map: Option<DmaMap>,
    invalidated: Arc<AtomicBool>,
}

impl Registration {
    /// Registers `range` of `subject` for `holder` with the client whose memory it is.
    ///
    /// # Errors
    /// `is_refused` where it is nobody's, or its client refuses; what was done before is undone.
    pub fn new(subject: &Subject, range: ByteRange, holder: &str) -> Result<Self> {
        Self::with(CLIENTS, subject, range, holder)
    }

    /// [`Self::new`] with clients of one's own.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with(
        clients: &[&'static dyn PeerClient],
        subject: &Subject,
        range: ByteRange,
        holder: &str,
    ) -> Result<Self> {
        let found =
            clients.iter().find_map(|client| Some((*client, client.acquire(subject, range)?)));
        let Some((client, claim)) = found else {
            return Err(Error::refused("no peer memory client knows this memory")
                .coded("memory-unknown")
                .remedy("register a device pointer, not a mapping of it"));
        };
        // Undone by its drop, as far as it has got.
        let mut new = Self {
            client,
            holder: holder.to_owned(),
            claim: None,
            pages: None,
            map: None,
            invalidated: Arc::default(),
        };
        let claim = new.claim.insert(claim);
        let invalidated = Arc::clone(&new.invalidated);
        let invalidate = Invalidate::new(move || invalidated.store(true, Ordering::Release));
        let pages = new.pages.insert(client.get_pages(claim, holder, invalidate)?);
        new.map = Some(client.dma_map(pages)?);
        Ok(new)
    }

    /// The client whose memory it is.
    pub fn client(&self) -> &'static dyn PeerClient {
        self.client
    }

    /// The pages.
    pub const fn pages(&self) -> Option<&PageTable> {
        self.pages.as_ref()
    }

    /// The addresses a NIC names.
    pub const fn map(&self) -> Option<&DmaMap> {
        self.map.as_ref()
    }

    /// The memory as a NIC in software takes it.
    ///
    /// # Errors
    /// `is_refused` with code `allocation-gone` where its owner took it back.
    pub fn memory(&self) -> Result<Memory> {
        match (&self.pages, self.is_invalidated()) {
            (Some(pages), false) => Ok(pages.memory().clone()),
            _ => {
                let error = format!("the memory registered by {} was taken back", self.holder);
                Err(Error::refused(error).coded("allocation-gone"))
            }
        }
    }

    /// Whether the owner took the pages back.
    pub fn is_invalidated(&self) -> bool {
        self.invalidated.load(Ordering::Acquire)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(map) = self.map.take() {
            self.client.dma_unmap(map);
        }
        if let Some(pages) = self.pages.take()
            && !self.is_invalidated()
        {
            self.client.put_pages(pages);
        }
        if let Some(claim) = self.claim.take() {
            self.client.release(claim);
        }
    }
}

/// Runs that are printed at most.
const SHOWN: usize = 8;

impl fmt::Display for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(pages), Some(map)) = (&self.pages, &self.map) else {
            return f.write_str("nothing is registered");
        };
        writeln!(f, "client {}, pages of {} bytes", self.client.name(), pages.page_size)?;
        for (run, (iova, _)) in pages.runs.iter().zip(&map.runs).take(SHOWN) {
            match run.addr {
                Address::Cpu(addr) => write!(f, "  VirtAddr {addr}")?,
                Address::Device(addr) => write!(f, "  DevicePtr {addr}")?,
            }
            match run.bus {
                Ok(bus) => write!(f, " -> BusAddr {bus}")?,
                Err(why) => write!(f, " -> BusAddr unknown ({why})")?,
            }
            writeln!(f, " -> Iova {iova}, {} bytes", run.len)?;
        }
        let more = pages.runs.len().saturating_sub(SHOWN);
        if more > 0 {
            writeln!(f, "  and {}", super::plural(more, "more run"))?;
        }
        write!(f, "  {}", map.why)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use beeline_sys::mem::HostMem;

    use super::*;
    use crate::config::SimConfig;
    use crate::gpu::{Gpu, Profile};
    use crate::lock;
    use crate::memory::peer::HostClient;

    /// Notes its calls, and fails where it is told.
    #[derive(Debug, Default)]
    struct Spy {
        calls: Mutex<Vec<&'static str>>,
        fail: Mutex<&'static str>,
        invalidate: Mutex<Option<Invalidate>>,
    }

    impl Spy {
        fn note(&self, call: &'static str) -> Result<()> {
            lock(&self.calls).push(call);
            if *lock(&self.fail) == call { Err(Error::refused(call)) } else { Ok(()) }
        }
    }

    impl PeerClient for Spy {
        fn name(&self) -> &'static str {
            "spy"
        }
        fn acquire(&self, subject: &Subject, range: ByteRange) -> Option<Claim> {
            self.note("acquire").ok()?;
            HostClient.acquire(subject, range)
        }
        fn get_pages(&self, claim: &Claim, holder: &str, gone: Invalidate) -> Result<PageTable> {
            self.note("get_pages")?;
            *lock(&self.invalidate) = Some(gone.clone());
            HostClient.get_pages(claim, holder, gone)
        }
        fn dma_map(&self, pages: &PageTable) -> Result<DmaMap> {
            self.note("dma_map")?;
            HostClient.dma_map(pages)
        }
        fn dma_unmap(&self, _: DmaMap) {
            let _ = self.note("dma_unmap");
        }
        fn put_pages(&self, _: PageTable) {
            let _ = self.note("put_pages");
        }
        fn page_size(&self, claim: &Claim) -> u64 {
            HostClient.page_size(claim)
        }
        fn release(&self, _: Claim) {
            let _ = self.note("release");
        }
    }

    fn host() -> Subject {
        Subject::Host(Arc::new(HostMem::anonymous(8192).unwrap()))
    }

    const ALL: ByteRange = ByteRange { start: 0, len: 8192 };

    #[test]
    fn whatever_was_done_is_undone_in_reverse_order() {
        let cases: &[(&str, bool, &str)] = &[
            ("", false, "acquire get_pages dma_map dma_unmap put_pages release"),
            ("", true, "acquire get_pages dma_map dma_unmap release"),
            ("acquire", false, "acquire"),
            ("get_pages", false, "acquire get_pages release"),
            ("dma_map", false, "acquire get_pages dma_map put_pages release"),
        ];
        for (fail, invalidated, expected) in cases {
            let spy: &'static Spy = Box::leak(Box::default());
            *lock(&spy.fail) = fail;
            let made = Registration::with(&[spy], &host(), ALL, "a test");
            assert_eq!(made.is_ok(), fail.is_empty(), "{fail}");
            if let (true, Ok(registration)) = (*invalidated, &made) {
                lock(&spy.invalidate).take().unwrap().call();
                assert_eq!(registration.memory().unwrap_err().code(), "allocation-gone");
            }
            drop(made);
            assert_eq!(lock(&spy.calls).join(" "), *expected, "fail at {fail:?}");
        }
    }

    #[test]
    fn every_kind_of_memory_finds_its_client() {
        let gpu = |profile| {
            let mut config = SimConfig::default();
            (config.profile, config.memory_bytes) = (profile, 1 << 20);
            Gpu::simulated(&config).unwrap()
        };
        let (plain, bar) = (gpu(Profile::Plain), gpu(Profile::Bar));
        let window = bar.alloc(8192).unwrap();
        let cases = [
            (host(), "host"),
            (Subject::Pinned(plain.pin(8192).unwrap()), "pinned host"),
            (Subject::Gpu(plain.alloc(8192).unwrap()), "simulated GPU"),
            (Subject::Gpu(bar.alloc(8192).unwrap()), "simulated GPU"),
            (Subject::Window(window.window().unwrap()), "BAR window"),
        ];
        for (subject, expected) in cases {
            let registration = Registration::new(&subject, ALL, "a test").unwrap();
            assert_eq!(registration.client().name(), expected);
            let pages: u64 = registration.pages().unwrap().runs.iter().map(|run| run.len).sum();
            let mapped: u64 = registration.map().unwrap().runs.iter().map(|(_, len)| len).sum();
            assert_eq!((pages, mapped), (8192, 8192), "{expected}");
            let text = registration.to_string();
            assert!(text.contains(" -> BusAddr ") && text.contains(" -> Iova "), "{text}");
            for range in [ByteRange { start: 1, len: 8192 }, ByteRange { start: 0, len: 0 }] {
                assert!(Registration::new(&subject, range, "x").unwrap_err().is_refused());
            }
        }
    }
}
