//! A guest of one boot sector that writes its memory for ever, and checks that no other VM does.
//!
//! ```text
//!   8 MiB   [ word | .... ] [ word | .... ] ...      1024 pages, of each only the first word is written
//!              word = value of the round + page << 16,  value = round << 8 | key
//! ```
//!
//! At each tick of the timer it checks the words of 64 pages, which must be those of the round before,
//! and writes those of this round. A byte at its serial port becomes its key from the next round on. It
//! answers with two bytes: whether a word was ever wrong, and the lowest byte of the round.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::session::{Session, eventually};
use crate::tiny_guest::TinyGuest;

const PATIENCE: Duration = Duration::from_secs(120);

/// The pages that it writes.
pub const WRITTEN_PAGES: usize = 1024;

/// 16-bit code, loaded at 0x7c00. ES has a limit of 4 GiB, which the BIOS takes away at each interrupt.
#[rustfmt::skip]
const CODE: &[u8] = &[
    0xfa,                                              //         cli
    0x31, 0xc0,                                        //         xor ax,ax
    0x8e, 0xd8,                                        //         mov ds,ax
    0x66, 0xc7, 0x06, 0x04, 0x06, 0x00, 0x01, 0x00, 0x00, //         mov [NEW],0x100
    0x66, 0xc7, 0x06, 0x08, 0x06, 0x00, 0x00, 0x00, 0x00, //         mov [PAGE],0x0
    0x66, 0xc7, 0x06, 0x0c, 0x06, 0x00, 0x00, 0x01, 0x00, //         mov [KEY],0x10000
    0xfb,                                              //         sti
    0xf4,                                              // next:   hlt
    0xba, 0xfd, 0x03,                                  //         mov dx,0x3fd
    0xec,                                              //         in al,dx
    0xa8, 0x01,                                        //         test al,0x1
    0x74, 0x0f,                                        //         je work
    0xba, 0xf8, 0x03,                                  //         mov dx,0x3f8
    0xec,                                              //         in al,dx
    0xa2, 0x0c, 0x06,                                  //         mov [KEY],al
    0xa0, 0x0d, 0x06,                                  //         mov al,[WRONG]
    0xee,                                              //         out dx,al
    0xa0, 0x05, 0x06,                                  //         mov al,[NEW+1]
    0xee,                                              //         out dx,al
    0xfa,                                              // work:   cli
    0x0f, 0x01, 0x16, 0xd8, 0x7c,                      //         lgdtw [table]
    0x0f, 0x20, 0xc0,                                  //         mov eax,cr0
    0x0c, 0x01,                                        //         or al,0x1
    0x0f, 0x22, 0xc0,                                  //         mov cr0,eax
    0xbb, 0x08, 0x00,                                  //         mov bx,0x8
    0x8e, 0xc3,                                        //         mov es,bx
    0x24, 0xfe,                                        //         and al,0xfe
    0x0f, 0x22, 0xc0,                                  //         mov cr0,eax
    0x66, 0x8b, 0x3e, 0x08, 0x06,                      //         mov edi,[PAGE]
    0xb9, 0x40, 0x00,                                  //         mov cx,0x40
    0x66, 0x89, 0xf8,                                  // page:   mov eax,edi
    0x66, 0xc1, 0xe0, 0x10,                            //         shl eax,0x10
    0x66, 0x89, 0xfb,                                  //         mov ebx,edi
    0x66, 0xc1, 0xe3, 0x0c,                            //         shl ebx,0xc
    0x66, 0x81, 0xc3, 0x00, 0x00, 0x80, 0x00,          //         add ebx,0x800000
    0x66, 0x89, 0xc2,                                  //         mov edx,eax
    0x66, 0x03, 0x16, 0x00, 0x06,                      //         add edx,[OLD]
    0x80, 0x3e, 0x0e, 0x06, 0x00,                      //         cmp [FIRST],0x0
    0x75, 0x0c,                                        //         jne write
    0x26, 0x67, 0x66, 0x39, 0x13,                      //         cmp es:[ebx],edx
    0x74, 0x05,                                        //         je write
    0xc6, 0x06, 0x0d, 0x06, 0x01,                      //         mov [WRONG],0x1
    0x66, 0x03, 0x06, 0x04, 0x06,                      // write:  add eax,[NEW]
    0x26, 0x67, 0x66, 0x89, 0x03,                      //         mov es:[ebx],eax
    0x66, 0x47,                                        //         inc edi
    0xe2, 0xc2,                                        //         loop page
    0x66, 0x81, 0xe7, 0xff, 0x03, 0x00, 0x00,          //         and edi,0x3ff
    0x66, 0x89, 0x3e, 0x08, 0x06,                      //         mov [PAGE],edi
    0x75, 0x1a,                                        //         jne done
    0xc6, 0x06, 0x0e, 0x06, 0x00,                      //         mov [FIRST],0x0
    0x66, 0xa1, 0x04, 0x06,                            //         mov eax,[NEW]
    0x66, 0xa3, 0x00, 0x06,                            //         mov [OLD],eax
    0xa0, 0x0c, 0x06,                                  //         mov al,[KEY]
    0x66, 0x05, 0x00, 0x01, 0x00, 0x00,                //         add eax,0x100
    0x66, 0xa3, 0x04, 0x06,                            //         mov [NEW],eax
    0xfb,                                              // done:   sti
    0xe9, 0x5e, 0xff,                                  //         jmp next
];

/// The descriptor of ES, and the table that it is in. They follow the code.
const TABLE_OFFSET: usize = 0xc8;
const TABLE: [u8; 22] = [
    0, 0, 0, 0, 0, 0, 0, 0, //
    0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0, //
    15, 0, 0xc8, 0x7c, 0, 0,
];

/// Runs it as VM `web`, until it has written all of its pages.
pub fn run_writer(session: &Session) {
    let mut code = CODE.to_vec();
    code.resize(TABLE_OFFSET, 0);
    code.extend(TABLE);
    TinyGuest::run_code(session, &code, &[]);
    let mut port = WriterPort::connect(&session.path("serial"));
    eventually("the guest has written all pages", PATIENCE, || port.ask(0).round >= 3);
}

/// What it answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriterAnswer {
    pub is_wrong: bool,
    pub round: u8,
}

/// Its serial port.
pub struct WriterPort(UnixStream);

impl WriterPort {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    /// Gives it a key, and reads its answer.
    pub fn ask(&mut self, key: u8) -> WriterAnswer {
        self.0.write_all(&[key]).unwrap();
        let mut answer = [0; 2];
        self.0.read_exact(&mut answer).unwrap();
        WriterAnswer { is_wrong: answer[0] != 0, round: answer[1] }
    }
}

/// The key that the word of this page was written with; `None` if no round writes such a word.
pub fn key_of(page: usize, word: u32) -> Option<u8> {
    let value = word.wrapping_sub((page as u32) << 16);
    (value >> 8 < 0x1_0000).then_some(value as u8)
}
