//! The server shop. Each method gets the context of the call (method, peer, timeout, metadata) and a request, or a
//! reader of requests. It returns a reply, or sends replies to a writer; or it returns Err(status(…)), a status of gRPC.
//! The traits and types are those of gen/server.rs.

// The services that the component serves; add a new one, and run `tripod component generate`.
// tripod:services shop.type.Cart
// tripod:services shop.type.Bindings
// tripod:services shop.type.TypesOfThingsThatAreOld
// tripod:services shop.v1.Cart

#[path = "../gen/server.rs"]
#[rustfmt::skip]
mod bindings;

use bindings::exports::proto::shop_type::bindings as shop_type_bindings;
use bindings::exports::proto::shop_type::cart;
use bindings::exports::proto::shop_type::types_of_things_that_are_old;
use bindings::exports::proto::shop_v1::cart as shop_v1_cart;
use bindings::tripod::grpc::types::{Context, Status};

struct Server;

bindings::export!(Server with_types_in bindings);

/// Returns a status with a code of gRPC: 3 is INVALID_ARGUMENT, 5 is NOT_FOUND.
#[allow(dead_code)]
fn status(code: u32, message: impl Into<String>) -> Status {
    Status {
        code,
        message: message.into(),
        details: Vec::new(),
    }
}

impl cart::Guest for Server {
    ///! Match has a name that is a word of Rust.
    fn match_(_context: Context, _request: cart::String) -> Result<cart::Option, Status> {
        Ok(Default::default()) // a reply without content
    }

    fn watch(
        _context: Context,
        _request: cart::String,
        replies: &cart::GoogleProtobufInt64ValueWriter,
    ) -> Result<(), Status> {
        replies.send(Default::default())
    }

    fn fill(_context: Context, requests: &cart::StringReader) -> Result<cart::String, Status> {
        while let Some(_request) = requests.next()? {
            // Use it.
        }
        Ok(Default::default()) // a reply without content
    }

    fn talk(
        _context: Context,
        requests: &cart::StringReader,
        replies: &cart::OptionWriter,
    ) -> Result<(), Status> {
        while let Some(_request) = requests.next()? {
            replies.send(&Default::default())?;
        }
        Ok(())
    }

    fn mirror(
        _context: Context,
        requests: &cart::OptionReader,
        replies: &cart::OptionWriter,
    ) -> Result<(), Status> {
        while let Some(request) = requests.next()? {
            replies.send(&request)?;
        }
        Ok(())
    }

    fn repeat(
        _context: Context,
        request: i64,
        replies: &cart::GoogleProtobufInt64ValueWriter,
    ) -> Result<(), Status> {
        replies.send(request)
    }

    fn load(
        _context: Context,
        _request: cart::Option,
        replies: &cart::GoogleProtobufBytesValueWriter,
    ) -> Result<(), Status> {
        replies.send(Default::default())
    }
}

impl shop_type_bindings::Guest for Server {
    fn answer_with_a_thing(
        _context: Context,
        request: shop_type_bindings::ShopV1Thing,
    ) -> Result<shop_type_bindings::ShopV1Thing, Status> {
        Ok(request)
    }
}

impl types_of_things_that_are_old::Guest for Server {
    fn addresses_of_all(
        _context: Context,
        _request: types_of_things_that_are_old::Option,
    ) -> Result<types_of_things_that_are_old::ShopV1Thing, Status> {
        Ok(Default::default()) // a reply without content
    }
}

impl shop_v1_cart::Guest for Server {
    fn add(_context: Context, request: shop_v1_cart::Thing) -> Result<shop_v1_cart::Thing, Status> {
        Ok(request)
    }
}
