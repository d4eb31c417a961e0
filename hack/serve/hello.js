addEventListener("fetch", (event) => event.respondWith(new Response("Hello, JavaScript!\n", { headers: { "content-type": "text/plain" } })));
